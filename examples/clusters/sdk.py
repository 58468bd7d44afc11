"""SkyPilot's Python SDK, with one line changed: import atoll as sky. `python sdk.py slurm/lab` runs it elsewhere."""

import sys

import atoll as sky

infra = sys.argv[1] if len(sys.argv) > 1 else "local"
task = sky.Task.from_yaml("train.yaml")
task.update_envs({"LR": 0.2})
task.set_resources(sky.Resources(infra=infra, accelerators="L4:1"))

request_id = sky.launch(task, cluster_name="sdk", idle_minutes_to_autostop=10, down=True)
job_id, handle = sky.stream_and_get(request_id)
print("launched", job_id, "on", handle.cluster_name, "with", handle.launched_nodes, "nodes")
code = sky.tail_logs(cluster_name="sdk", job_id=job_id, follow=True)

# Several at once, one GPU each: they share the nodes.
for rate in (0.5, 0.1, 0.02):
    one = sky.Task(name=f"lr-{rate}", workdir=".", run="python3 fit.py", envs={"LR": rate})
    one.set_resources(sky.Resources(accelerators="L4:1"))
    sky.get(sky.exec(one, cluster_name="sdk"))
for job in sky.get(sky.queue("sdk")):
    if not job["status"].ended:
        sky.tail_logs("sdk", job["job_id"], output_stream=lambda data: None)  # waits for its end
for job in sky.get(sky.queue("sdk")):
    print(job["job_id"], job["job_name"], job["status"].value)
sky.get(sky.down("sdk"))
sys.exit(code)
