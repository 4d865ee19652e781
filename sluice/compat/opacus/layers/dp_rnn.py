"""Opacus's recurrent layers, which are PyTorch's own here."""

from torch.nn import GRU as DPGRU
from torch.nn import LSTM as DPLSTM
from torch.nn import RNN as DPRNN

__all__ = ["DPGRU", "DPLSTM", "DPRNN"]
