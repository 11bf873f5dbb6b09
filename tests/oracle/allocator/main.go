// Allocator answers with kube-scheduler's own allocator which devices claims get on one node. It reads one JSON case
// a line and writes one JSON answer a line.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// No case of a test needs a search this long; one that does is told apart by its error.
const patience = 2 * time.Second

// testCase is a node, what its drivers publish, what is allocated already, and the claims of one pod.
type testCase struct {
	Node    v1.Node                                     `json:"node"`
	Slices  []*resourceapi.ResourceSlice                `json:"slices"`
	Classes []*resourceapi.DeviceClass                  `json:"classes"`
	Held    []resourceapi.DeviceRequestAllocationResult `json:"held"`
	Claims  []*resourceapi.ResourceClaim                `json:"claims"`
}

// answer holds one allocation a claim, or null when nothing fits. Selector is set when some selector fails on some
// device of the node, whether or not the allocator reached it.
type answer struct {
	Allocations []resourceapi.AllocationResult `json:"allocations"`
	Error       string                         `json:"error"`
	Selector    bool                           `json:"selector"`
	TimedOut    bool                           `json:"timedOut"`
}

type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("no class %q", name)
}

func main() {
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := json.NewEncoder(os.Stdout)
	cache := cel.NewCache(256, cel.Features{EnableConsumableCapacity: true})
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var asked testCase
			if bad := json.Unmarshal(line, &asked); bad != nil {
				fmt.Fprintln(os.Stderr, "not a case:", bad)
				os.Exit(2)
			}
			if bad := out.Encode(judge(asked, cache)); bad != nil {
				os.Exit(1)
			}
		}
		if err != nil {
			return
		}
	}
}

func judge(asked testCase, cache *cel.Cache) answer {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	features := structured.Features{
		AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
		PartitionableDevices: true, PrioritizedList: true,
	}
	given := answer{Selector: anySelectorFails(ctx, asked, cache)}
	allocator, err := structured.NewAllocator(ctx, features, state(asked.Held), classes(asked.Classes), asked.Slices, cache)
	if err == nil {
		given.Allocations, err = allocator.Allocate(ctx, &asked.Node, asked.Claims)
	}
	if err != nil {
		given.Error = err.Error()
		given.TimedOut = errors.Is(err, context.DeadlineExceeded)
	}
	return given
}

// state is what kube-scheduler keeps of the results of allocated claims (its foreachAllocatedDevice).
func state(held []resourceapi.DeviceRequestAllocationResult) structured.AllocatedState {
	found := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, result := range held {
		if result.AdminAccess != nil && *result.AdminAccess {
			continue
		}
		device := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
		if result.ShareID == nil {
			found.AllocatedDevices.Insert(device)
			continue
		}
		found.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(device, result.ShareID))
		if result.ConsumedCapacity != nil {
			found.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(device, result.ConsumedCapacity))
		}
	}
	return found
}

func anySelectorFails(ctx context.Context, asked testCase, cache *cel.Cache) bool {
	for _, claim := range asked.Claims {
		for _, request := range claim.Spec.Devices.Requests {
			if request.Exactly != nil &&
				fails(ctx, asked, cache, request.Exactly.DeviceClassName, request.Exactly.Selectors) {
				return true
			}
			for _, sub := range request.FirstAvailable {
				if fails(ctx, asked, cache, sub.DeviceClassName, sub.Selectors) {
					return true
				}
			}
		}
	}
	return false
}

func fails(
	ctx context.Context, asked testCase, cache *cel.Cache, class string, selectors []resourceapi.DeviceSelector,
) bool {
	all := selectors
	if found, err := classes(asked.Classes).Get(class); err == nil {
		all = append(append([]resourceapi.DeviceSelector{}, found.Spec.Selectors...), selectors...)
	}
	for _, slice := range asked.Slices {
		for _, device := range slice.Spec.Devices {
			input := cel.Device{
				Driver: slice.Spec.Driver, AllowMultipleAllocations: device.AllowMultipleAllocations,
				Attributes: device.Attributes, Capacity: device.Capacity,
			}
			for _, selector := range all {
				program := cache.GetOrCompile(selector.CEL.Expression)
				if program.Error != nil {
					return true
				}
				matches, _, err := program.DeviceMatches(ctx, input)
				if err != nil {
					return true
				}
				if !matches {
					break
				}
			}
		}
	}
	return false
}
