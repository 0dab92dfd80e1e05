"""A CRI proxy that writes down what a kubelet asks for: proxy.py LISTEN TARGET RECORD.jsonl

Every call's bytes go through unchanged. Calls that change the runtime, and those that name an image, are written to RECORD as one JSON line each:
time, method, request (field names as in the proto file, unset fields left out), and the answer or the error. Needs grpcio and grpcio-tools.
"""
import json, os, sys, threading, time
from concurrent import futures
import grpc
from cri import OPTIONS, text

listen, target, record_file = sys.argv[1:4]
QUIET = {'Version', 'Status', 'ListPodSandbox', 'ListContainers', 'PodSandboxStatus', 'ContainerStatus', 'ListImages', 'ImageFsInfo', 'RuntimeConfig',
         'ListContainerStats', 'ListPodSandboxStats', 'ContainerStats', 'PodSandboxStats', 'ListMetricDescriptors', 'ListPodSandboxMetrics'}

lock, channel = threading.Lock(), grpc.insecure_channel('unix:' + target, OPTIONS)
out = open(record_file, 'a', buffering=1)

def record(method, began, request, **result):
    line = {'t': round(began, 3), 'took': round(time.time() - began, 3), 'method': method, 'request': text(method + 'Request', request), **result}
    with lock: out.write(json.dumps(line, ensure_ascii=False) + '\n')

def metadata(context):
    return [(k, v) for k, v in context.invocation_metadata() if not k.startswith(':') and k not in ('user-agent', 'content-type', 'te', 'grpc-accept-encoding')]


class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        path = details.method; method = path.rsplit('/', 1)[1]
        if method == 'GetContainerEvents' or method.startswith('Stream'):
            def stream(request, context):
                call = channel.unary_stream(path, None, None)(request, metadata=metadata(context)); context.add_callback(call.cancel)
                try: yield from call
                except grpc.RpcError as e: context.abort(e.code(), e.details())
            return grpc.unary_stream_rpc_method_handler(stream, None, None)
        def unary(request, context):
            left, began = context.time_remaining(), time.time()  # a call without a deadline shows as one centuries away
            try: answer = channel.unary_unary(path, None, None)(request, metadata=metadata(context), timeout=left if left and left < 1e6 else None)
            except grpc.RpcError as e:
                if method not in QUIET: record(method, began, request, error=f'{e.code().name}: {e.details()}')
                context.abort(e.code(), e.details())
            if method not in QUIET: record(method, began, request, answer=text(method + 'Response', answer))
            return answer
        return grpc.unary_unary_rpc_method_handler(unary, None, None)


if os.path.exists(listen): os.unlink(listen)
server = grpc.server(futures.ThreadPoolExecutor(64), handlers=[Handler()], options=OPTIONS)
server.add_insecure_port('unix:' + listen); server.start(); server.wait_for_termination()
