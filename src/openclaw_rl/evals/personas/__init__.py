"""The people that evaluations simulate: what they want, how to tell whether they got it, and what they say then."""
