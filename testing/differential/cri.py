"""The CRI's messages from the proto file, a client, and messages as JSON. Needs grpcio and grpcio-tools."""
import importlib.resources, os, sys, tempfile
import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_tools import protoc

PROTO = os.path.join(os.path.dirname(os.path.abspath(__file__)), '../../crates/cri-api/proto/runtime.proto')
OPTIONS = [('grpc.max_receive_message_length', -1), ('grpc.max_send_message_length', -1)]


def _messages():
    with tempfile.NamedTemporaryFile() as out:
        include = str(importlib.resources.files('grpc_tools') / '_proto')
        if protoc.main(['protoc', '-I', os.path.dirname(PROTO), '-I', include, '--descriptor_set_out=' + out.name, '--include_imports', PROTO]):
            sys.exit('cannot read ' + PROTO)
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read())
    pool = descriptor_pool.DescriptorPool()
    for f in files.file: pool.Add(f)
    return {n.rsplit('.', 1)[1]: c for n, c in message_factory.GetMessageClassesForFiles([f.name for f in files.file], pool).items()}


KINDS = _messages()


def text(kind, data):
    """A message as a dict: names as in the proto file, unset fields left out, 64-bit numbers as text."""
    return json_format.MessageToDict(KINDS[kind].FromString(data), preserving_proto_field_name=True)


class Client:
    """`client.ListContainers(filter={...})` gives the answer as a dict."""
    def __init__(self, socket): self.channel = grpc.insecure_channel('unix:' + socket, OPTIONS)
    def __getattr__(self, method):
        service = 'ImageService' if 'Image' in method else 'RuntimeService'
        def call(timeout=60, **fields):
            request = json_format.ParseDict(fields, KINDS[method + 'Request']()).SerializeToString()
            return text(method + 'Response', self.channel.unary_unary(f'/runtime.v1.{service}/{method}', None, None)(request, timeout=timeout))
        return call
