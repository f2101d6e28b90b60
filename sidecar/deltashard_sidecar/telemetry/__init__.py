"""What people see: log lines, metrics, incidents."""
