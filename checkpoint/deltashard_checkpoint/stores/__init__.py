"""Object stores: a small protocol (`abc.py`), back-ends, and retries around them."""
