"""Other libraries' names, so that programs written for them run here: `sluice.compat.opacus`."""
