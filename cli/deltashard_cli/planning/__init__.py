"""`deltashard plan`: what checkpoints of a run would cost and save, before it runs or while it does."""
