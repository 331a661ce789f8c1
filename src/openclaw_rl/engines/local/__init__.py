"""The local engine: PyTorch on this machine's CPU or GPU, in worker processes of its own."""
