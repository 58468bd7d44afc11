"""``atoll dashboard``: a page that shows clusters, jobs, their logs and loss curves, and GPUs in use.

``views`` gives what the page shows, from the operations that the commands use. ``app`` makes a Starlette application
of them, to be served alone (``server``) or mounted by another one.
"""
