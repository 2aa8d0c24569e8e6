"""Parts of the large stages: golden positions and sensitivity of the head, surgery and proofs of the SLM."""
