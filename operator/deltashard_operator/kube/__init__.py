"""The Kubernetes rim: names, quantities, owners, calls, leases."""
