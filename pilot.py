import sys, json, os, time
from dataclasses import replace
from multiprocessing import get_context
def one(job):
    task, steps, scheme, seed, lr = job
    import torch; torch.set_num_threads(1); torch.set_flush_denormal(True)
    from lab.tasks.task import TASKS
    from lab.convergence.scheme import parse_scheme
    from lab.convergence.training import train
    t = replace(TASKS[task], steps=steps)
    s = replace(parse_scheme(scheme), lr_scale=lr)
    r = train(t, s, seed)
    return job, r.metric, r.bytes_mean, r.dense_bytes, r.seconds
if __name__ == "__main__":
    path = sys.argv[1]; jobs = [tuple(j) for j in json.load(open(sys.argv[2]))]
    done = {}
    if os.path.exists(path): done = {tuple(json.loads(k)): v for k, v in json.load(open(path)).items()}
    todo = [j for j in jobs if j not in done]
    with get_context("spawn").Pool(2) as pool:
        for job, metric, sent, dense, sec in pool.imap_unordered(one, todo):
            done[job] = [metric, dense / sent, sec]
            json.dump({json.dumps(k): v for k, v in done.items()}, open(path, "w"))
            base = done.get((job[0], job[1], "dense", job[3], 1.0))
            rel = "" if base is None or metric is None else f"{(metric/base[0]-1)*100:+.1f} %"
            print(job, round(metric or -1, 4), rel, f"{dense/sent:.0f}x", f"{sec:.0f}s", flush=True)
