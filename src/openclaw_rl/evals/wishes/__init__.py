"""The suite of wishes: what people may want of answers, and how soon they get it."""
