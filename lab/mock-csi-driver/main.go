// mock-csi-driver: Kubernetes' own mock CSI driver (test/e2e/storage/drivers/csi-test) on two sockets of this node.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/test/e2e/storage/drivers/csi-test/mock/service"
)

type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: "CSIPlugin", Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (r registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	log.Printf("registered: %v %s", s.PluginRegistered, s.Error)
	return &registration.RegistrationStatusResponse{}, nil
}

func serve(path string, register func(*grpc.Server)) {
	os.Remove(path)
	l, err := net.Listen("unix", path)
	if err != nil {
		log.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		answer, err := next(ctx, req)
		log.Printf("%s %v: %v %v", info.FullMethod, req, answer, err)
		return answer, err
	}))
	register(s)
	log.Fatal(s.Serve(l))
}

func main() {
	name := flag.String("name", "mock.csi.test", "name of the driver")
	socket := flag.String("socket", "", "the driver's socket")
	registry := flag.String("registry", "", "the socket in plugins_registry")
	flag.Parse()
	s := service.New(service.Config{DriverName: *name, DisableAttach: true, NodeExpansionRequired: true, NodeVolumeConditionRequired: true, PermissiveTargetPath: true})
	go serve(*socket, func(g *grpc.Server) {
		csi.RegisterIdentityServer(g, s)
		csi.RegisterNodeServer(g, s)
	})
	serve(*registry, func(g *grpc.Server) { registration.RegisterRegistrationServer(g, registrar{name: *name, endpoint: *socket}) })
}
