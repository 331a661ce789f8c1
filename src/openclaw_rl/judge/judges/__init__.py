"""The judges: explicit feedback, rules, a language model, the user's code. A panel asks them in turn."""
