"""The losses that the learner minimises, as pure functions of tensors: no model, no device, no state."""
