"""What each response token of a judged turn learns: one file a method."""
