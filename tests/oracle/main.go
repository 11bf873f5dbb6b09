// Oracle answers, with the code of Kubernetes itself, whether the API server accepts ResourceSlices and which
// devices the scheduler's allocator takes from them. It reads one JSON case a line and writes one JSON answer a line.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"
)

// testCase is what is asked: the slices of one node's pool, devices already given out, and a claim to allocate.
type testCase struct {
	Slices []json.RawMessage          `json:"slices"`
	Held   []string                   `json:"held"`
	Shares []share                    `json:"shares"`
	Claim  *resourceapi.ResourceClaim `json:"claim"`
}

// share is a part of a device that an earlier claim has.
type share struct {
	Device   string                                             `json:"device"`
	Consumed map[resourceapi.QualifiedName]apiresource.Quantity `json:"consumed"`
}

// answer holds why slices were refused, and the devices allocated; Devices is null when nothing fits.
type answer struct {
	Refused []string `json:"refused"`
	Devices []string `json:"devices"`
	Error   string   `json:"error"`
}

func main() {
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := json.NewEncoder(os.Stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var asked testCase
			if bad := json.Unmarshal(line, &asked); bad != nil {
				fmt.Fprintln(os.Stderr, "not a case:", bad)
				os.Exit(2)
			}
			if bad := out.Encode(judge(asked)); bad != nil {
				os.Exit(1)
			}
		}
		if err != nil {
			return
		}
	}
}

func judge(asked testCase) answer {
	given := answer{Refused: []string{}}
	var slices []*resourceapi.ResourceSlice
	for _, raw := range asked.Slices {
		if err := accept(raw); err != nil {
			given.Refused = append(given.Refused, err.Error())
		}
		slice := &resourceapi.ResourceSlice{}
		if err := json.Unmarshal(raw, slice); err != nil {
			given.Error = err.Error()
			return given
		}
		slices = append(slices, slice)
	}
	if asked.Claim != nil {
		devices, err := allocate(slices, asked)
		given.Devices = devices
		if err != nil {
			given.Error = err.Error()
		}
	}
	return given
}

// accept does what the API server does with a slice that is created: strict decoding, defaults, validation. The
// server answers a panic (1.36 divides by a step of zero) with an error.
func accept(raw []byte) (refused error) {
	defer func() {
		if reason := recover(); reason != nil {
			refused = fmt.Errorf("panic: %v", reason)
		}
	}()
	codecs := serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict)
	decoder := codecs.UniversalDecoder(resource.SchemeGroupVersion)
	object, err := runtime.Decode(decoder, raw)
	if err != nil {
		return err
	}
	metadata, err := meta.Accessor(object)
	if err != nil {
		return err
	}
	rest.FillObjectMetaSystemFields(metadata)
	info := &genericapirequest.RequestInfo{APIGroup: "resource.k8s.io", APIVersion: "v1", Resource: "resourceslices"}
	ctx := genericapirequest.WithNamespace(genericapirequest.NewContext(), metav1.NamespaceNone)
	ctx = genericapirequest.WithRequestInfo(ctx, info)
	return rest.BeforeCreate(resourceslice.Strategy, ctx, object)
}

type classes struct{}

// One class that takes every device, so that claims decide by selectors alone.
var anyDevice = &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "any"}}

func (classes) List() ([]*resourceapi.DeviceClass, error) {
	return []*resourceapi.DeviceClass{anyDevice}, nil
}

func (classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if name != anyDevice.Name {
		return nil, fmt.Errorf("no class %q", name)
	}
	return anyDevice, nil
}

// allocate asks the allocator of kube-scheduler with the features that are on by default in 1.37.
func allocate(slices []*resourceapi.ResourceSlice, asked testCase) ([]string, error) {
	if len(slices) == 0 {
		return nil, nil
	}
	pool := slices[0].Spec
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, device := range asked.Held {
		state.AllocatedDevices.Insert(structured.MakeDeviceID(pool.Driver, pool.Pool.Name, device))
	}
	for number, held := range asked.Shares {
		device := structured.MakeDeviceID(pool.Driver, pool.Pool.Name, held.Device)
		uid := types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", number))
		state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(device, &uid))
		state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(device, held.Consumed))
	}
	features := structured.Features{
		AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
		PartitionableDevices: true, PrioritizedList: true,
	}
	ctx := context.Background()
	cache := cel.NewCache(64, cel.Features{EnableConsumableCapacity: true})
	allocator, err := structured.NewAllocator(ctx, features, state, classes{}, slices, cache)
	if err != nil {
		return nil, err
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: *pool.NodeName}}
	results, err := allocator.Allocate(ctx, node, []*resourceapi.ResourceClaim{asked.Claim})
	if err != nil || results == nil {
		return nil, err
	}
	devices := []string{}
	for _, result := range results[0].Devices.Results {
		devices = append(devices, result.Device)
	}
	return devices, nil
}
