"""Pages of our own: made from parts, answered by a program, and checked by what was done on them."""
