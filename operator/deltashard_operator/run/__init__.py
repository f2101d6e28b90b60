"""One run as the controller knows it: facts in, conclusions out. Pure."""
