"""GPU operations with the signatures of kernels/reference.py. Imported only where their packages are installed."""
