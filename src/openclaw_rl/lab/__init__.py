"""What evaluations and environments share: servers of their own, statistics, schemas, splits and charts."""
