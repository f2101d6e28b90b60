"""A store in Google Cloud Storage or Azure Blob Storage, through obstore."""
