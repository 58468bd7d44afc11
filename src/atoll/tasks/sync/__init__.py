"""What a task brings along, on the disks of its nodes: the workdir and ``file_mounts``."""
