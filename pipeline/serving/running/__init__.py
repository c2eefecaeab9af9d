"""What turns a launch plan into running servers: on this machine, in containers, over Ray, or by taking one that runs.

::

    with LocalLauncher(find_vllm().executable).deploy(plan, processes, folder) as running:
        print(*(server.base_url for server in running.servers))
        running.watch()

What a launcher started is gone when the block ends, and when its owner does, by SIGKILL too.
"""
