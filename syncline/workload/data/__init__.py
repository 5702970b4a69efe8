"""What is trained on: where data comes from, and how it becomes batches."""
