"""One file per gate rule; see `base` for the contract."""
