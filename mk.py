import json,sys
def s(density, m=0.95, units=None, method="ahead", **k):
    o=[f"density={density}",f"memory=decoupled[momentum={m}]"]+([f"units={units}"] if units is not None else [])+[f"{a}={b}" for a,b in k.items()]
    return f"{method}[{','.join(o)}]"
jobs=[]
for seed in (0,1,2): jobs.append(("bytes-transformer",400,"dense",seed,1.0))
for seed in (0,1,2):
    for d,u in ((0.01,0.0),(0.01,0.1),(0.02,0.0),(0.02,0.1),(0.005,0.1),(0.1,0.1)):
        jobs.append(("bytes-transformer",400,s(d,units=u),seed,1.0))
json.dump(jobs,open("/tmp/j1.json","w"))
