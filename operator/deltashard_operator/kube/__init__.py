"""Access to the Kubernetes API: names, quantities, owners, requests, leases, watches."""
