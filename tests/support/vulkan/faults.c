// A Vulkan layer in which a device can be lost, run out of memory, or be a lesser one, for tests.
//
// MTP_VK_LOST=submit in the environment: from now on submissions fail. MTP_VK_LOST=wait: waits for them do.
// MTP_VK_BYTES=N: at most N bytes of the device's memory can be allocated at a time.
// MTP_VK_RANGE=N: a shader can read N bytes of a tensor, too few for some operations.
// MTP_VK_ORDER=1: at its end the process prints how many copies were recorded after a computation without a
// barrier or a wait between them. A GPU may make such a copy too early; a software device never does.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vulkan/vk_layer.h>
#include <vulkan/vulkan.h>

enum { MOST = 1 << 14 };

static PFN_vkGetInstanceProcAddr next_instance;
static PFN_vkGetDeviceProcAddr next_device;
static struct { VkDeviceMemory memory; VkDeviceSize size; } allocated[MOST];

static int lost(const char * when) {
    const char * asked = getenv("MTP_VK_LOST");
    return asked != NULL && strcmp(asked, when) == 0;
}

static VkDeviceSize in_use(void) {
    VkDeviceSize sum = 0;
    for (int i = 0; i < MOST; ++i) {
        sum += allocated[i].memory != VK_NULL_HANDLE ? allocated[i].size : 0;
    }
    return sum;
}

static VKAPI_ATTR VkResult VKAPI_CALL allocate(VkDevice device, const VkMemoryAllocateInfo * info,
                                               const VkAllocationCallbacks * callbacks, VkDeviceMemory * out) {
    const char * most = getenv("MTP_VK_BYTES");
    if (most != NULL && in_use() + info->allocationSize > strtoull(most, NULL, 10)) {
        return VK_ERROR_OUT_OF_DEVICE_MEMORY;
    }
    const VkResult result = ((PFN_vkAllocateMemory) next_device(device, "vkAllocateMemory"))(device, info, callbacks, out);
    for (int i = 0; result == VK_SUCCESS && i < MOST; ++i) {
        if (allocated[i].memory == VK_NULL_HANDLE) {
            allocated[i].memory = *out;
            allocated[i].size = info->allocationSize;
            break;
        }
    }
    return result;
}

static VKAPI_ATTR void VKAPI_CALL release(VkDevice device, VkDeviceMemory memory, const VkAllocationCallbacks * callbacks) {
    for (int i = 0; memory != VK_NULL_HANDLE && i < MOST; ++i) {
        if (allocated[i].memory == memory) {
            allocated[i].memory = VK_NULL_HANDLE;
        }
    }
    ((PFN_vkFreeMemory) next_device(device, "vkFreeMemory"))(device, memory, callbacks);
}

static VkInstance the_instance;
static PFN_vkGetPhysicalDeviceProperties2 next_properties;

static VKAPI_ATTR void VKAPI_CALL get_properties(VkPhysicalDevice physical, VkPhysicalDeviceProperties2 * out) {
    next_properties(physical, out);
    const char * range = getenv("MTP_VK_RANGE");
    if (range != NULL) {
        out->properties.limits.maxStorageBufferRange = (uint32_t) strtoul(range, NULL, 10);
    }
}

static VkDevice the_device;

static int computing; // something is computed that nothing waits for yet
static long copies, early;

__attribute__((destructor)) static void print_order(void) {
    if (getenv("MTP_VK_ORDER") != NULL) {
        printf("%ld of %ld copies too early\n", early, copies);
    }
}

#define NEXT(name) ((PFN_vk##name) next_device(the_device, "vk" #name))

// Submissions that fail are not made. Before a wait fails, all work ends: nothing runs on a lost device.
#define SUBMIT(name, parameters, ...)                                           \
    static VKAPI_ATTR VkResult VKAPI_CALL name parameters {                     \
        return lost("submit") ? VK_ERROR_DEVICE_LOST : NEXT(name)(__VA_ARGS__); \
    }
#define WAIT(name, parameters, ...)                                             \
    static VKAPI_ATTR VkResult VKAPI_CALL name parameters {                     \
        if (lost("wait")) {                                                     \
            NEXT(DeviceWaitIdle)(the_device);                                   \
            return VK_ERROR_DEVICE_LOST;                                        \
        }                                                                       \
        const VkResult result = NEXT(name)(__VA_ARGS__);                        \
        computing = computing && result != VK_SUCCESS;                          \
        return result;                                                          \
    }
#define COMMAND(name, effect, parameters, ...)          \
    static VKAPI_ATTR void VKAPI_CALL name parameters { \
        effect;                                         \
        NEXT(name)(__VA_ARGS__);                        \
    }
SUBMIT(QueueSubmit, (VkQueue q, uint32_t n, const VkSubmitInfo * s, VkFence f), q, n, s, f)
SUBMIT(QueueSubmit2, (VkQueue q, uint32_t n, const VkSubmitInfo2 * s, VkFence f), q, n, s, f)
WAIT(QueueWaitIdle, (VkQueue q), q)
WAIT(DeviceWaitIdle, (VkDevice d), d)
WAIT(GetFenceStatus, (VkDevice d, VkFence f), d, f)
WAIT(WaitForFences, (VkDevice d, uint32_t n, const VkFence * f, VkBool32 all, uint64_t t), d, n, f, all, t)
WAIT(WaitSemaphores, (VkDevice d, const VkSemaphoreWaitInfo * s, uint64_t t), d, s, t)
COMMAND(CmdDispatch, computing = 1, (VkCommandBuffer c, uint32_t x, uint32_t y, uint32_t z), c, x, y, z)
COMMAND(CmdCopyBuffer, (++copies, early += computing),
        (VkCommandBuffer c, VkBuffer from, VkBuffer to, uint32_t n, const VkBufferCopy * r), c, from, to, n, r)
COMMAND(CmdPipelineBarrier, computing = 0,
        (VkCommandBuffer c, VkPipelineStageFlags before, VkPipelineStageFlags after, VkDependencyFlags flags, uint32_t n,
         const VkMemoryBarrier * m, uint32_t n_b, const VkBufferMemoryBarrier * b, uint32_t n_i,
         const VkImageMemoryBarrier * i), c, before, after, flags, n, m, n_b, b, n_i, i)

static VKAPI_ATTR VkResult VKAPI_CALL create_instance(const VkInstanceCreateInfo * info,
                                                      const VkAllocationCallbacks * callbacks, VkInstance * out) {
    VkLayerInstanceCreateInfo * link = (VkLayerInstanceCreateInfo *) info->pNext;
    while (link->sType != VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO) {
        link = (VkLayerInstanceCreateInfo *) link->pNext;
    }
    next_instance = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    const VkResult result =
        ((PFN_vkCreateInstance) next_instance(VK_NULL_HANDLE, "vkCreateInstance"))(info, callbacks, out);
    if (result == VK_SUCCESS) {
        the_instance = *out;
        next_properties =
            (PFN_vkGetPhysicalDeviceProperties2) next_instance(*out, "vkGetPhysicalDeviceProperties2");
    }
    return result;
}

static VKAPI_ATTR VkResult VKAPI_CALL create_device(VkPhysicalDevice physical, const VkDeviceCreateInfo * info,
                                                    const VkAllocationCallbacks * callbacks, VkDevice * out) {
    VkLayerDeviceCreateInfo * link = (VkLayerDeviceCreateInfo *) info->pNext;
    while (link->sType != VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO) {
        link = (VkLayerDeviceCreateInfo *) link->pNext;
    }
    const PFN_vkGetInstanceProcAddr instance = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    next_device = link->u.pLayerInfo->pfnNextGetDeviceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    const VkResult result =
        ((PFN_vkCreateDevice) instance(the_instance, "vkCreateDevice"))(physical, info, callbacks, out);
    the_device = *out;
    return result;
}

static PFN_vkVoidFunction own(const char * name) {
    static const struct { const char * name; PFN_vkVoidFunction function; } functions[] = {
#define OWN(name, function) {"vk" #name, (PFN_vkVoidFunction) function}
        OWN(AllocateMemory, allocate),      OWN(FreeMemory, release),
        OWN(QueueSubmit, QueueSubmit),      OWN(QueueSubmit2, QueueSubmit2),
        OWN(QueueWaitIdle, QueueWaitIdle),  OWN(DeviceWaitIdle, DeviceWaitIdle),
        OWN(GetFenceStatus, GetFenceStatus), OWN(WaitForFences, WaitForFences),
        OWN(WaitSemaphores, WaitSemaphores), OWN(CreateDevice, create_device),
        OWN(CreateInstance, create_instance), OWN(GetPhysicalDeviceProperties2, get_properties),
        OWN(CmdDispatch, CmdDispatch),      OWN(CmdCopyBuffer, CmdCopyBuffer),
        OWN(CmdPipelineBarrier, CmdPipelineBarrier),
    };
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); ++i) {
        if (strcmp(functions[i].name, name) == 0) {
            return functions[i].function;
        }
    }
    return NULL;
}

VK_LAYER_EXPORT VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetDeviceProcAddr(VkDevice device, const char * name) {
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) {
        return (PFN_vkVoidFunction) vkGetDeviceProcAddr;
    }
    const PFN_vkVoidFunction found = own(name);
    return found != NULL ? found : next_device(device, name);
}

VK_LAYER_EXPORT VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    if (strcmp(name, "vkGetInstanceProcAddr") == 0) {
        return (PFN_vkVoidFunction) vkGetInstanceProcAddr;
    }
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) {
        return (PFN_vkVoidFunction) vkGetDeviceProcAddr;
    }
    const PFN_vkVoidFunction found = own(name);
    return found != NULL ? found : next_instance(instance, name);
}
