"""What is minimised: each objective defines its loss and nothing else."""
