"""Two Ray nodes on this machine, as a process of its own: prints the address, kills the second node when told to.

python ray_nodes.py       # "address HOST:PORT"; a line "kill" on stdin is answered by "killed", its end ends all
"""

import sys

from ray.cluster_utils import Cluster

QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 20}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": QUICK})
    second = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    sys.stdout.write(f"address {cluster.address}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
            sys.stdout.write("killed\n")
            sys.stdout.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main()
