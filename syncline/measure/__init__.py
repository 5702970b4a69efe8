"""Stage 7b: experiments that run ranks: comparison, certificates, probes, memory."""
