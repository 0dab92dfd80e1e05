#!/usr/bin/env python3
"""Pack a rootfs directory as an OCI image archive: mkimage.py OUT.tar NAME[,NAME...] ROOTFS [--entrypoint JSON] [--cmd JSON] [--env K=V]... [--user U] [--workdir D]"""
import argparse, gzip, hashlib, io, json, os, platform, tarfile
ARCH={'x86_64':'amd64','aarch64':'arm64'}.get(platform.machine(),platform.machine())
p=argparse.ArgumentParser(); p.add_argument('out'); p.add_argument('names'); p.add_argument('rootfs')
p.add_argument('--entrypoint',default='[]'); p.add_argument('--cmd',default='[]'); p.add_argument('--env',action='append',default=[]); p.add_argument('--user',default=''); p.add_argument('--workdir',default='')
p.add_argument('--stopsignal',default='')
a=p.parse_args()
buf=io.BytesIO(); t=tarfile.open(fileobj=buf,mode='w',format=tarfile.PAX_FORMAT)
def norm(ti): ti.mtime=0; ti.uid=ti.gid=0; ti.uname=ti.gname='root'; return ti
for n in sorted(os.listdir(a.rootfs)): t.add(os.path.join(a.rootfs,n),arcname=n,filter=norm)
t.close(); raw=buf.getvalue(); diffid='sha256:'+hashlib.sha256(raw).hexdigest()
layer=gzip.compress(raw,mtime=0); blobs={}
def put(b): d=hashlib.sha256(b).hexdigest(); blobs[d]=b; return {'digest':'sha256:'+d,'size':len(b)}
c={'Env':['PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin']+a.env}
if json.loads(a.entrypoint): c['Entrypoint']=json.loads(a.entrypoint)
if json.loads(a.cmd): c['Cmd']=json.loads(a.cmd)
if a.user: c['User']=a.user
if a.workdir: c['WorkingDir']=a.workdir
if a.stopsignal: c['StopSignal']=a.stopsignal
l=put(layer); l['mediaType']='application/vnd.oci.image.layer.v1.tar+gzip'
ms=[]
for n in a.names.split(','): # each name its own image id, as in a real registry: the layer is shared
    cfg=put(json.dumps({'architecture':ARCH,'os':'linux','config':c,'rootfs':{'type':'layers','diff_ids':[diffid]},'history':[{'created':'1970-01-01T00:00:00Z','created_by':'mkimage '+n}]}).encode())
    cfg['mediaType']='application/vnd.oci.image.config.v1+json'
    m=put(json.dumps({'schemaVersion':2,'mediaType':'application/vnd.oci.image.manifest.v1+json','config':cfg,'layers':[l]}).encode())
    ms.append({'mediaType':'application/vnd.oci.image.manifest.v1+json',**m,'platform':{'architecture':ARCH,'os':'linux'},'annotations':{'io.containerd.image.name':n,'org.opencontainers.image.ref.name':n}})
files={'oci-layout':b'{"imageLayoutVersion":"1.0.0"}','index.json':json.dumps({'schemaVersion':2,'manifests':ms}).encode()}
files.update({'blobs/sha256/'+d:b for d,b in blobs.items()})
with tarfile.open(a.out,'w') as o:
    for n,b in files.items():
        ti=tarfile.TarInfo(n); ti.size=len(b); o.addfile(ti,io.BytesIO(b))
