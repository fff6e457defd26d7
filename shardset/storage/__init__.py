"""Local folders, memory and Google Cloud Storage behind one protocol."""
