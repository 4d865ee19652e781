"""Opacus's layers. Sluice trains PyTorch's own, so these are they: state dicts are those of PyTorch."""

from torch.nn import MultiheadAttention as DPMultiheadAttention

from sluice.compat.opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]
