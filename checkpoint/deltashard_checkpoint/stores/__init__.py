"""Object stores: one small protocol (`abc.py`), back-ends, retries around them, and the suite that defines them."""
