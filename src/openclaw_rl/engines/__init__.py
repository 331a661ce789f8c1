"""Where tokens are sampled and gradients computed. `base.py` says what an engine is."""
