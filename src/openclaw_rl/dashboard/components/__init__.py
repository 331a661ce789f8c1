"""Pages to look at: one file each, with all that they need inside, in one look."""
