"""Slurm: ``provider`` gets nodes with a job, ``submission`` says what is submitted, ``answers`` what Slurm says."""
