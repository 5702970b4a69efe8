"""Stage 2: one seam, Communicator, between ranks."""
