"""One file per quantizer; see `base` for the contract."""
