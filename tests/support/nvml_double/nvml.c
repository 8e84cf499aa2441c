/* libnvidia-ml.so.1 answered from a scenario: the library, handles, identity, clocks, power, heat.
 * Layouts are those of nvml.h as the real pynvml passes them. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

device SYSTEM = {-1, NO_MIG};
device gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIG];
int references, gpu_count, branch, revision;

void load(void) {
    static int loaded;
    answer a;
    if (loaded) return;
    loaded = 1;
    scenario_load();
    gpu_count = scenario_number("gpus", 0);
    if (gpu_count > MAX_GPUS) gpu_count = MAX_GPUS;
    for (int i = 0; i < MAX_GPUS; i++) {
        gpus[i] = (device){i, NO_MIG};
        for (int j = 0; j < MAX_MIG; j++) migs[i][j] = (device){i, j};
    }
    if (!ask(&SYSTEM, "driver", 0, NULL, &a)) sscanf(a.text, "%d.%d", &branch, &revision);
}

int is_handle(H d) {
    return (d >= gpus && d < gpus + gpu_count) ||
           (d >= migs[0] && d < migs[0] + MAX_GPUS * MAX_MIG);
}

int get(H d, const char *function, int argc, const U *argv, answer *a) {
    if (!references) return UNINITIALIZED;
    if (d != &SYSTEM && !is_handle(d)) return INVALID_ARGUMENT;
    return ask(d, function, argc, argv, a);
}

int get_uint(H d, const char *function, int argc, const U *argv, U *out) {
    answer a;
    if (!out) return INVALID_ARGUMENT;
    int code = get(d, function, argc, argv, &a);
    if (!code) *out = (U)number(&a, 0);
    return code;
}

int get_u64(H d, const char *function, int argc, const U *argv, U64 *out) {
    answer a;
    if (!out) return INVALID_ARGUMENT;
    int code = get(d, function, argc, argv, &a);
    if (!code) *out = number(&a, 0);
    return code;
}

int get_pair(H d, const char *function, U *first, U *second) {
    answer a;
    int code = get(d, function, 0, NULL, &a);
    if (!code) *first = (U)number(&a, 0), *second = (U)number(&a, 1);
    return code;
}

int get_text(H d, const char *function, int argc, const U *argv, char *out, U size) {
    answer a;
    int code = get(d, function, argc, argv, &a);
    if (code) return code;
    if (strlen(a.text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, a.text);
    return SUCCESS;
}

/* --- library, system --- */

static int init(void) {
    answer a;
    load();
    /* the key is optional: without it init succeeds */
    int code = knows(&SYSTEM, "Init", 0, NULL) ? ask(&SYSTEM, "Init", 0, NULL, &a) : SUCCESS;
    if (!code) references++;
    return code;
}

API(0) nvmlInit(void) { return init(); }
API(0) nvmlInit_v2(void) { return init(); }
API(0) nvmlInitWithFlags(U flags) { return flags > 3 ? INVALID_ARGUMENT : init(); }

API(0) nvmlShutdown(void) {
    if (!references) return UNINITIALIZED;
    references--;
    return SUCCESS;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code) {
    switch (code) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 8: return "Insufficient External Power";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 11: return "Interrupt Request Issue";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 14: return "Corrupted infoROM";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    case 25: return "Argument version mismatch";
    case 26: return "The requested functionality has been deprecated";
    case 27: return "System is not ready for the request";
    case 28: return "No GPUs were found";
    default: return "Unknown Error";
    }
}

API(0) nvmlSystemGetDriverVersion(char *out, U size) {
    return get_text(&SYSTEM, "driver", 0, NULL, out, size);
}

API(0) nvmlSystemGetNVMLVersion(char *out, U size) { /* answers before init, too */
    answer a, cuda;
    load();
    if (ask(&SYSTEM, "driver", 0, NULL, &a) || ask(&SYSTEM, "cuda", 0, NULL, &cuda)) return 999;
    snprintf(out, size, "%u.%s", (U)number(&cuda, 0) / 1000, a.text);
    return SUCCESS;
}

API(0) nvmlSystemGetCudaDriverVersion(U *out) { return get_uint(&SYSTEM, "cuda", 0, NULL, out); }
API(0) nvmlSystemGetCudaDriverVersion_v2(U *out) { return get_uint(&SYSTEM, "cuda", 0, NULL, out); }

typedef struct { U version; char branch[80]; } driver_branch;
API(560) nvmlSystemGetDriverBranch(driver_branch *info, U size) {
    if (info->version != VERSION(*info, 1)) return VERSION_MISMATCH;
    int code = references ? SUCCESS : UNINITIALIZED;
    if (!code) snprintf(info->branch, size < 80 ? size : 80, "r%d_00", branch);
    return code;
}

typedef struct { U environment, feature, tools; } conf_compute_state;
API(535) nvmlSystemGetConfComputeState(conf_compute_state *state) {
    answer a;
    int code = get(&SYSTEM, "ConfComputeState", 0, NULL, &a);
    if (code) return code;
    state->environment = number(&a, 0), state->feature = number(&a, 1);
    state->tools = number(&a, 2);
    return SUCCESS;
}

typedef struct { U version, environment, feature, tools, multi_gpu; } conf_compute_settings;
API(550) nvmlSystemGetConfComputeSettings(conf_compute_settings *state) {
    answer a;
    if (state->version != VERSION(*state, 1)) return VERSION_MISMATCH;
    int code = get(&SYSTEM, "ConfComputeState", 0, NULL, &a);
    if (code) return code;
    state->environment = number(&a, 0), state->feature = number(&a, 1);
    state->tools = number(&a, 2), state->multi_gpu = 0;
    return SUCCESS;
}

/* --- handles --- */

static int get_count(U *out) {
    if (!references) return UNINITIALIZED;
    *out = gpu_count;
    log_call(&SYSTEM, "Count", 0, NULL, SUCCESS);
    return SUCCESS;
}

static int get_handle(int index, H *out) {
    answer a;
    if (!references) return UNINITIALIZED;
    if (index < 0 || index >= gpu_count) return INVALID_ARGUMENT;
    int code = ask(&gpus[index], "Handle", 0, NULL, &a);
    if (code == NOT_SUPPORTED) code = SUCCESS; /* the key is optional */
    if (!code) *out = &gpus[index];
    return code;
}

static int find_by_text(const char *key, const char *wanted, H *out) {
    answer a;
    if (!references) return UNINITIALIZED;
    for (int i = 0; i < gpu_count; i++)
        if (!ask(&gpus[i], key, 0, NULL, &a) && !strcasecmp(a.text, wanted))
            return get_handle(i, out);
    return NOT_FOUND;
}

API(0) nvmlDeviceGetCount(U *out) { return get_count(out); }
API(0) nvmlDeviceGetCount_v2(U *out) { return get_count(out); }
API(0) nvmlDeviceGetHandleByIndex(U i, H *out) { return get_handle(i, out); }
API(0) nvmlDeviceGetHandleByIndex_v2(U i, H *out) { return get_handle(i, out); }
API(0) nvmlDeviceGetHandleByUUID(const char *uuid, H *out) {
    return find_by_text("UUID", uuid, out);
}

API(0) nvmlDeviceGetHandleBySerial(const char *serial, H *out) {
    return find_by_text("Serial", serial, out);
}

API(0) nvmlDeviceGetHandleByPciBusId_v2(const char *text, H *out) {
    char address[32];
    U domain, bus, slot;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) return INVALID_ARGUMENT;
    snprintf(address, sizeof address, "%04x:%02x:%02x.0", domain, bus, slot);
    return find_by_text("pci", address, out);
}

API(0) nvmlDeviceGetIndex(H d, U *out) {
    if (!references) return UNINITIALIZED;
    if (!is_handle(d)) return INVALID_ARGUMENT;
    *out = d->index;
    return SUCCESS;
}

/* --- identity --- */

int get_pci(H d, const char *key, int argc, const U *argv, pci_info *out) {
    answer a;
    int code = get(d, key, argc, argv, &a);
    if (code) return code;
    memset(out, 0, sizeof *out);
    if (sscanf(a.text, "%x:%x:%x", &out->domain, &out->bus, &out->slot) != 3) return 999;
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff,
             out->bus & 0xff, out->slot & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus, out->slot);
    if (argc == 0) {
        if (!ask(d, "PciDeviceId", 0, NULL, &a)) out->device_id = number(&a, 0);
        if (!ask(d, "PciSubsystemId", 0, NULL, &a)) out->subsystem_id = number(&a, 0);
    }
    return SUCCESS;
}

API(0) nvmlDeviceGetPciInfo_v3(H d, pci_info *out) { return get_pci(d, "pci", 0, NULL, out); }

TEXT(0, Name)
TEXT(0, UUID)
TEXT(0, Serial)
TEXT(0, BoardPartNumber)
TEXT(0, VbiosVersion)
TEXT(0, InforomImageVersion)
UINT(0, MinorNumber)
UINT(0, Brand)
UINT(0, BoardId)
UINT(0, MultiGpuBoard)
UINT(535, ModuleId)
UINT(550, NumaNodeId)
UINT(450, Architecture)
UINT(510, BusType)
UINT(510, NumGpuCores)
UINT(510, MemoryBusWidth)
PAIR(0, CudaComputeCapability)
API(0) nvmlDeviceGetInforomVersion(H d, U object, char *out, U size) {
    return get_text(d, "InforomVersion", ARGS(object), out, size);
}

API(510) nvmlDeviceGetGspFirmwareVersion(H d, char *out) {
    return get_text(d, "GspFirmwareVersion", 0, NULL, out, 64);
}

PAIR(510, GspFirmwareMode)

/* --- modes --- */

UINT(0, PersistenceMode)
UINT(0, ComputeMode)
UINT(0, DisplayActive)
UINT(0, VirtualizationMode)
PAIR(0, DriverModel)
PAIR(0, EccMode)
API(0) nvmlDeviceGetDisplayMode(H d, U *out) {
    return branch >= 590 ? DEPRECATED : get_uint(d, "DisplayMode", 0, NULL, out);
}

API(0) nvmlDeviceGetPowerManagementMode(H d, U *out) {
    return branch >= 590 ? DEPRECATED : get_uint(d, "PowerManagementMode", 0, NULL, out);
}

/* --- clocks, power, heat --- */

UINT(0, PerformanceState)
UINT(0, PowerState)
UINT1(0, ClockInfo)
UINT1(0, MaxClockInfo)
UINT1(0, MaxCustomerBoostClock)
API(0) nvmlDeviceGetApplicationsClock(H d, U type, U *out) {
    return branch >= 590 ? DEPRECATED : get_uint(d, "ApplicationsClock", ARGS(type), out);
}

API(0) nvmlDeviceGetDefaultApplicationsClock(H d, U type, U *out) {
    return branch >= 590 ? DEPRECATED : get_uint(d, "DefaultApplicationsClock", ARGS(type), out);
}

API(0) nvmlDeviceGetClock(H d, U type, U id, U *out) {
    if (id == 1 || id == 2) {
        const char *key = id == 1 ? "ApplicationsClock" : "DefaultApplicationsClock";
        return branch >= 590 ? DEPRECATED : get_uint(d, key, ARGS(type), out);
    }
    return get_uint(d, id == 0 ? "ClockInfo" : "MaxCustomerBoostClock", ARGS(type), out);
}

API(535) nvmlDeviceGetCurrentClocksEventReasons(H d, U64 *out) {
    return get_u64(d, "ClocksEventReasons", 0, NULL, out);
}

API(0) nvmlDeviceGetCurrentClocksThrottleReasons(H d, U64 *out) {
    return get_u64(d, "ClocksEventReasons", 0, NULL, out);
}

API(535) nvmlDeviceGetSupportedClocksEventReasons(H d, U64 *out) {
    return get_u64(d, "SupportedClocksEventReasons", 0, NULL, out);
}

API(0) nvmlDeviceGetSupportedClocksThrottleReasons(H d, U64 *out) {
    return get_u64(d, "SupportedClocksEventReasons", 0, NULL, out);
}

UINT(0, PowerUsage)
UINT(0, PowerManagementLimit)
UINT(0, PowerManagementDefaultLimit)
UINT(0, EnforcedPowerLimit)
PAIR(0, PowerManagementLimitConstraints)
ULL(0, TotalEnergyConsumption)

UINT1(0, Temperature)
UINT1(0, TemperatureThreshold)
typedef struct { U version, sensor; int temperature; } temperature_v;
API(570) nvmlDeviceGetTemperatureV(H d, temperature_v *out) {
    if (out->version != VERSION(*out, 1)) return VERSION_MISMATCH;
    return get_uint(d, "Temperature", ARGS(out->sensor), (U *)&out->temperature);
}
typedef struct { U version; int margin; } margin_temperature;
API(570) nvmlDeviceGetMarginTemperature(H d, margin_temperature *out) {
    if (out->version != VERSION(*out, 1)) return VERSION_MISMATCH;
    return get_uint(d, "MarginTemperature", 0, NULL, (U *)&out->margin);
}
UINT(510, NumFans)
UINT(0, FanSpeed)
API(0) nvmlDeviceGetFanSpeed_v2(H d, U fan, U *out) {
    return get_uint(d, "FanSpeed", ARGS(fan), out);
}
