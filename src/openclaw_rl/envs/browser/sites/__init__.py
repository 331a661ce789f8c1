"""Built-in sites: made from parts, answered by a program, and checked by what was done on them."""
