"""The model: weights, one forward pass, adapters."""
