"""The model: its weights, its forward pass and its adapters."""
