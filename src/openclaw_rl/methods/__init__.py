"""What each response token of a judged turn learns: one file per method."""
