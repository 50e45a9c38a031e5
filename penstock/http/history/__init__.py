"""History: how the queues and the broker did, over days, in a few files beside the log.

steps      what is known of a step of time, and how steps become coarser ones
chunks     steps as bytes, and bytes as steps
folder     the files: what is appended, folded, left out and thrown away
recorder   what the mirror sees, cut into steps
keeper     the task and the thread that do all this beside the requests
marks      what happened besides: starts, pauses, deployments
"""
