"""The judges: explicit feedback, rules, a language model, the owner's code. A panel asks them in turn."""
