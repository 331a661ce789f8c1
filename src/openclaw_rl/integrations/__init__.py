"""What other projects call: functions for their own extension points."""
