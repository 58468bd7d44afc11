"""Language models as single-device modules; parallelism is applied to them from outside."""
