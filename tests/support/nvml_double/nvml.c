/* The functions of libnvidia-ml.so.1 that a collector calls, answered from a scenario.
 * The number in API(…) and the macros built on it is the driver branch that first exports the
 * function (__init__.py reads it and hides the function from older drivers).
 * Layouts are those of nvml.h as the real pynvml passes them. */
#include "scenario.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    VERSION_MISMATCH = 25,
    DEPRECATED = 26,
};

typedef device *H;
typedef unsigned U;
typedef uint64_t U64;

#define API(since) __attribute__((visibility("default"))) int
#define ARGS(...) (int)(sizeof((U[]){__VA_ARGS__}) / sizeof(U)), (U[]){__VA_ARGS__}
#define VERSION(type, n) ((U)(sizeof(type) | (n) << 24))

static device SYSTEM = {-1, NO_MIG};
static device gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIG];
static int loaded, references, gpu_count, branch, revision;

static void load(void) {
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

static int is_handle(H d) {
    return (d >= gpus && d < gpus + gpu_count) || (d >= migs[0] && d < migs[0] + MAX_GPUS * MAX_MIG);
}

static int get(H d, const char *function, int argc, const U *argv, answer *a) {
    if (!references) return UNINITIALIZED;
    if (d != &SYSTEM && !is_handle(d)) return INVALID_ARGUMENT;
    return ask(d, function, argc, argv, a);
}

static int get_uint(H d, const char *function, int argc, const U *argv, U *out) {
    answer a;
    if (!out) return INVALID_ARGUMENT;
    int code = get(d, function, argc, argv, &a);
    if (!code) *out = (U)number(&a, 0);
    return code;
}

static int get_u64(H d, const char *function, int argc, const U *argv, U64 *out) {
    answer a;
    if (!out) return INVALID_ARGUMENT;
    int code = get(d, function, argc, argv, &a);
    if (!code) *out = number(&a, 0);
    return code;
}

static int get_pair(H d, const char *function, U *first, U *second) {
    answer a;
    int code = get(d, function, 0, NULL, &a);
    if (!code) *first = (U)number(&a, 0), *second = (U)number(&a, 1);
    return code;
}

static int get_text(H d, const char *function, int argc, const U *argv, char *out, U size) {
    answer a;
    int code = get(d, function, argc, argv, &a);
    if (code) return code;
    if (strlen(a.text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, a.text);
    return SUCCESS;
}

/* nvmlDeviceGet<name>, by what it takes and gives */
#define UINT(since, name) API(since) nvmlDeviceGet##name(H d, U *out) { return get_uint(d, #name, 0, NULL, out); }
#define UINT1(since, name) API(since) nvmlDeviceGet##name(H d, U x, U *out) { return get_uint(d, #name, ARGS(x), out); }
#define ULL(since, name) API(since) nvmlDeviceGet##name(H d, U64 *out) { return get_u64(d, #name, 0, NULL, out); }
#define ULL2(since, name) API(since) nvmlDeviceGet##name(H d, U x, U y, U64 *out) { return get_u64(d, #name, ARGS(x, y), out); }
#define PAIR(since, name) API(since) nvmlDeviceGet##name(H d, U *x, U *y) { return get_pair(d, #name, x, y); }
#define TEXT(since, name) API(since) nvmlDeviceGet##name(H d, char *out, U size) { return get_text(d, #name, 0, NULL, out, size); }

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

API(0) nvmlSystemGetDriverVersion(char *out, U size) { return get_text(&SYSTEM, "driver", 0, NULL, out, size); }

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
    if (!code) state->environment = number(&a, 0), state->feature = number(&a, 1), state->tools = number(&a, 2);
    return code;
}

typedef struct { U version, environment, feature, tools, multi_gpu; } conf_compute_settings;
API(550) nvmlSystemGetConfComputeSettings(conf_compute_settings *state) {
    answer a;
    if (state->version != VERSION(*state, 1)) return VERSION_MISMATCH;
    int code = get(&SYSTEM, "ConfComputeState", 0, NULL, &a);
    if (!code) state->environment = number(&a, 0), state->feature = number(&a, 1), state->tools = number(&a, 2), state->multi_gpu = 0;
    return code;
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
        if (!ask(&gpus[i], key, 0, NULL, &a) && !strcasecmp(a.text, wanted)) return get_handle(i, out);
    return NOT_FOUND;
}

API(0) nvmlDeviceGetCount(U *out) { return get_count(out); }
API(0) nvmlDeviceGetCount_v2(U *out) { return get_count(out); }
API(0) nvmlDeviceGetHandleByIndex(U i, H *out) { return get_handle(i, out); }
API(0) nvmlDeviceGetHandleByIndex_v2(U i, H *out) { return get_handle(i, out); }
API(0) nvmlDeviceGetHandleByUUID(const char *uuid, H *out) { return find_by_text("UUID", uuid, out); }
API(0) nvmlDeviceGetHandleBySerial(const char *serial, H *out) { return find_by_text("Serial", serial, out); }

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

typedef struct {
    char legacy[16];
    U domain, bus, slot, device_id, subsystem_id;
    char bus_id[32];
} pci_info;

static int get_pci(H d, const char *key, int argc, const U *argv, pci_info *out) {
    answer a;
    int code = get(d, key, argc, argv, &a);
    if (code) return code;
    memset(out, 0, sizeof *out);
    if (sscanf(a.text, "%x:%x:%x", &out->domain, &out->bus, &out->slot) != 3) return 999;
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff, out->slot & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus, out->slot);
    if (argc == 0) {
        if (!ask(d, "PciDeviceId", 0, NULL, &a)) out->device_id = number(&a, 0);
        if (!ask(d, "PciSubsystemId", 0, NULL, &a)) out->subsystem_id = number(&a, 0);
    }
    return SUCCESS;
}

API(0) nvmlDeviceGetPciInfo_v3(H d, pci_info *out) { return get_pci(d, "pci", 0, NULL, out); }
API(0) nvmlDeviceGetNvLinkRemotePciInfo_v2(H d, U link, pci_info *out) { return get_pci(d, "NvLinkRemotePciInfo", ARGS(link), out); }

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
API(0) nvmlDeviceGetInforomVersion(H d, U object, char *out, U size) { return get_text(d, "InforomVersion", ARGS(object), out, size); }
API(510) nvmlDeviceGetGspFirmwareVersion(H d, char *out) { return get_text(d, "GspFirmwareVersion", 0, NULL, out, 64); }
PAIR(510, GspFirmwareMode)

/* --- modes --- */

UINT(0, PersistenceMode)
UINT(0, ComputeMode)
UINT(0, DisplayActive)
UINT(0, VirtualizationMode)
PAIR(0, EccMode)
API(0) nvmlDeviceGetDisplayMode(H d, U *out) { return branch >= 590 ? DEPRECATED : get_uint(d, "DisplayMode", 0, NULL, out); }
API(0) nvmlDeviceGetPowerManagementMode(H d, U *out) { return branch >= 590 ? DEPRECATED : get_uint(d, "PowerManagementMode", 0, NULL, out); }

/* --- clocks, power, heat --- */

UINT(0, PerformanceState)
UINT(0, PowerState)
UINT1(0, ClockInfo)
UINT1(0, MaxClockInfo)
UINT1(0, MaxCustomerBoostClock)
API(0) nvmlDeviceGetApplicationsClock(H d, U type, U *out) { return branch >= 590 ? DEPRECATED : get_uint(d, "ApplicationsClock", ARGS(type), out); }
API(0) nvmlDeviceGetDefaultApplicationsClock(H d, U type, U *out) { return branch >= 590 ? DEPRECATED : get_uint(d, "DefaultApplicationsClock", ARGS(type), out); }

API(0) nvmlDeviceGetClock(H d, U type, U id, U *out) {
    if (id == 1 || id == 2) {
        const char *key = id == 1 ? "ApplicationsClock" : "DefaultApplicationsClock";
        return branch >= 590 ? DEPRECATED : get_uint(d, key, ARGS(type), out);
    }
    return get_uint(d, id == 0 ? "ClockInfo" : "MaxCustomerBoostClock", ARGS(type), out);
}

API(535) nvmlDeviceGetCurrentClocksEventReasons(H d, U64 *out) { return get_u64(d, "ClocksEventReasons", 0, NULL, out); }
API(0) nvmlDeviceGetCurrentClocksThrottleReasons(H d, U64 *out) { return get_u64(d, "ClocksEventReasons", 0, NULL, out); }
API(535) nvmlDeviceGetSupportedClocksEventReasons(H d, U64 *out) { return get_u64(d, "SupportedClocksEventReasons", 0, NULL, out); }
API(0) nvmlDeviceGetSupportedClocksThrottleReasons(H d, U64 *out) { return get_u64(d, "SupportedClocksEventReasons", 0, NULL, out); }

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
API(0) nvmlDeviceGetFanSpeed_v2(H d, U fan, U *out) { return get_uint(d, "FanSpeed", ARGS(fan), out); }

/* --- load, memory, processes --- */

PAIR(0, UtilizationRates)
PAIR(0, EncoderUtilization)
PAIR(0, DecoderUtilization)

/* MemoryInfo = total reserved used */
API(0) nvmlDeviceGetMemoryInfo(H d, U64 *out) {
    answer a;
    int code = get(d, "MemoryInfo", 0, NULL, &a);
    if (code) return code;
    out[0] = number(&a, 0), out[2] = number(&a, 1) + number(&a, 2), out[1] = out[0] - out[2];
    return SUCCESS;
}

typedef struct { U version; U64 total, reserved, free, used; } memory_info;
API(510) nvmlDeviceGetMemoryInfo_v2(H d, memory_info *out) {
    answer a;
    if (out->version != VERSION(*out, 2)) return VERSION_MISMATCH;
    int code = get(d, "MemoryInfo", 0, NULL, &a);
    if (code) return code;
    out->total = number(&a, 0), out->reserved = number(&a, 1), out->used = number(&a, 2);
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

/* BAR1MemoryInfo = total used */
API(0) nvmlDeviceGetBAR1MemoryInfo(H d, U64 *out) {
    answer a;
    int code = get(d, "BAR1MemoryInfo", 0, NULL, &a);
    if (!code) out[0] = number(&a, 0), out[2] = number(&a, 1), out[1] = out[0] - out[2];
    return code;
}

typedef struct { U pid; U64 memory; U gi, ci; } process;
typedef struct { U pid; U64 memory; U gi, ci; U64 protected_memory; } process_detail;

/* "pid:memory[:gi:ci]" */
static process parse_process(const answer *a, int which) {
    char text[64], *save;
    process p = {0, UINT64_MAX, UINT32_MAX, UINT32_MAX};
    token(a, which, text, sizeof text);
    char *part = strtok_r(text, ":", &save);
    if (part) p.pid = strtoul(part, NULL, 10);
    if ((part = strtok_r(NULL, ":", &save))) {
        answer memory = {.calls = a->calls};
        snprintf(memory.text, sizeof memory.text, "%s", part);
        p.memory = number(&memory, 0);
    }
    if ((part = strtok_r(NULL, ":", &save))) p.gi = strtoul(part, NULL, 10);
    if ((part = strtok_r(NULL, ":", &save))) p.ci = strtoul(part, NULL, 10);
    return p;
}

static int get_processes(H d, const char *key, U *count, process *out) {
    answer a;
    char text[64];
    int code = get(d, key, 0, NULL, &a);
    if (code) return code;
    U have = 0;
    while (strcmp(a.text, "none") && token(&a, have, text, sizeof text)) have++;
    U room = *count;
    *count = have;
    if (have > room) return INSUFFICIENT_SIZE;
    for (U i = 0; i < have; i++) out[i] = parse_process(&a, i);
    return SUCCESS;
}

#define PROCESSES(since, name, suffix) \
    API(since) nvmlDeviceGet##name##suffix(H d, U *count, process *out) { return get_processes(d, #name, count, out); }
PROCESSES(0, ComputeRunningProcesses, _v2)
PROCESSES(510, ComputeRunningProcesses, _v3)
PROCESSES(0, GraphicsRunningProcesses, _v2)
PROCESSES(510, GraphicsRunningProcesses, _v3)
PROCESSES(0, MPSComputeRunningProcesses, _v2)
PROCESSES(510, MPSComputeRunningProcesses, _v3)

typedef struct { U version, mode, count; process_detail *out; } running_process_detail_list;
API(535) nvmlDeviceGetRunningProcessDetailList(H d, running_process_detail_list *list) {
    static const char *const KEYS[] = {"ComputeRunningProcesses", "GraphicsRunningProcesses", "MPSComputeRunningProcesses"};
    process found[64];
    U have = 64;
    if (list->version != VERSION(*list, 1)) return VERSION_MISMATCH;
    if (list->mode > 2) return INVALID_ARGUMENT;
    int code = get_processes(d, KEYS[list->mode], &have, found);
    if (code) return code;
    U room = list->count;
    list->count = have;
    if (have > room) return INSUFFICIENT_SIZE;
    for (U i = 0; i < have; i++) list->out[i] = (process_detail){found[i].pid, found[i].memory, found[i].gi, found[i].ci, UINT64_MAX};
    return SUCCESS;
}

/* --- PCIe --- */

UINT(0, CurrPcieLinkGeneration)
UINT(0, CurrPcieLinkWidth)
UINT(0, MaxPcieLinkGeneration)
UINT(0, MaxPcieLinkWidth)
UINT(525, GpuMaxPcieLinkGeneration)
UINT(515, PcieSpeed)
UINT(510, PcieLinkMaxSpeed)
UINT(0, PcieReplayCounter)
API(0) nvmlDeviceGetPcieThroughput(H d, U counter, U *out) {
    nanosleep(&(struct timespec){0, 20000000}, NULL); /* the real one samples for 20 ms */
    return get_uint(d, "PcieThroughput", ARGS(counter), out);
}

/* --- memory errors --- */

ULL2(0, TotalEccErrors)
API(0) nvmlDeviceGetMemoryErrorCounter(H d, U type, U counter, U location, U64 *out) { return get_u64(d, "MemoryErrorCounter", ARGS(type, counter, location), out); }

/* SramEccErrorStatus = the members in the order of the struct, the threshold flag last */
typedef struct { U version; U64 counters[11]; U threshold; } sram_ecc_error_status;
API(535) nvmlDeviceGetSramEccErrorStatus(H d, sram_ecc_error_status *out) {
    answer a;
    if (out->version != VERSION(*out, 1)) return VERSION_MISMATCH;
    int code = get(d, "SramEccErrorStatus", 0, NULL, &a);
    if (code) return code;
    for (int i = 0; i < 11; i++) out->counters[i] = number(&a, i);
    out->threshold = (U)number(&a, 11);
    return SUCCESS;
}

/* RemappedRows = correctable uncorrectable pending failure */
API(450) nvmlDeviceGetRemappedRows(H d, U *cor, U *unc, U *pending, U *failure) {
    answer a;
    int code = get(d, "RemappedRows", 0, NULL, &a);
    if (!code) *cor = number(&a, 0), *unc = number(&a, 1), *pending = number(&a, 2), *failure = number(&a, 3);
    return code;
}

/* RowRemapperHistogram = max high partial low none */
API(460) nvmlDeviceGetRowRemapperHistogram(H d, U *out) {
    answer a;
    int code = get(d, "RowRemapperHistogram", 0, NULL, &a);
    for (int i = 0; !code && i < 5; i++) out[i] = number(&a, i);
    return code;
}

/* RetiredPages.<cause> = addresses, or "none" */
static int get_retired(H d, U cause, U *count, U64 *pages, U64 *times) {
    answer a;
    char text[64];
    int code = get(d, "RetiredPages", ARGS(cause), &a);
    if (code) return code;
    U have = 0, room = *count;
    while (strcmp(a.text, "none") && token(&a, have, text, sizeof text)) have++;
    *count = have;
    if (have > room) return INSUFFICIENT_SIZE;
    for (U i = 0; i < have; i++) {
        pages[i] = number(&a, i);
        if (times) times[i] = 1700000000u + i;
    }
    return SUCCESS;
}

API(0) nvmlDeviceGetRetiredPages(H d, U cause, U *count, U64 *pages) { return get_retired(d, cause, count, pages, NULL); }
API(0) nvmlDeviceGetRetiredPages_v2(H d, U cause, U *count, U64 *pages, U64 *times) { return get_retired(d, cause, count, pages, times); }
UINT(0, RetiredPagesPendingStatus)
typedef struct { U version, channel, tpc; } repair_status;
API(580) nvmlDeviceGetRepairStatus(H d, repair_status *out) {
    answer a;
    if (out->version != VERSION(*out, 1)) return VERSION_MISMATCH;
    int code = get(d, "RepairStatus", 0, NULL, &a);
    if (!code) out->channel = number(&a, 0), out->tpc = number(&a, 1);
    return code;
}
typedef struct { U version, flag; } unrepairable_memory_flag;
API(590) nvmlDeviceGetUnrepairableMemoryFlag_v1(H d, unrepairable_memory_flag *out) {
    if (out->version != VERSION(*out, 1)) return VERSION_MISMATCH;
    return get_uint(d, "UnrepairableMemoryFlag", 0, NULL, &out->flag);
}

/* --- NVLink, fabric, C2C --- */

UINT1(0, NvLinkState)
UINT1(0, NvLinkVersion)
UINT1(0, NvLinkRemoteDeviceType)
API(0) nvmlDeviceGetNvLinkCapability(H d, U link, U capability, U *out) { return get_uint(d, "NvLinkCapability", ARGS(link, capability), out); }
API(0) nvmlDeviceGetNvLinkErrorCounter(H d, U link, U counter, U64 *out) { return get_u64(d, "NvLinkErrorCounter", ARGS(link, counter), out); }
API(545) nvmlDeviceGetC2cModeInfoV(H d, U *out) { return get_uint(d, "C2cModeInfo", 0, NULL, out); }

typedef struct { unsigned char uuid[16]; int status; U clique, state; } fabric_v1;
typedef struct { U version; unsigned char uuid[16]; int status; U clique, state, mask; } fabric_v2;
typedef struct { U version; unsigned char uuid[16]; int status; U clique, state, mask; unsigned char summary; } fabric_v3;

/* GpuFabricInfo = state status clique mask summary uuid(32 hex digits) */
static int get_fabric(H d, fabric_v3 *out) {
    answer a;
    char text[64];
    int code = get(d, "GpuFabricInfo", 0, NULL, &a);
    if (code) return code;
    out->state = number(&a, 0), out->status = number(&a, 1), out->clique = number(&a, 2);
    out->mask = number(&a, 3), out->summary = number(&a, 4);
    memset(out->uuid, 0, 16);
    if (token(&a, 5, text, sizeof text))
        for (int i = 0; i < 16; i++) sscanf(text + 2 * i, "%2hhx", &out->uuid[i]);
    return SUCCESS;
}

API(525) nvmlDeviceGetGpuFabricInfo(H d, fabric_v1 *out) {
    fabric_v3 full;
    int code = get_fabric(d, &full);
    if (code) return code;
    memcpy(out->uuid, full.uuid, 16);
    out->status = full.status, out->clique = full.clique, out->state = full.state;
    return SUCCESS;
}

API(550) nvmlDeviceGetGpuFabricInfoV(H d, fabric_v3 *out) {
    fabric_v3 full;
    int newest = branch >= 570 && out->version == VERSION(fabric_v3, 3);
    if (!newest && out->version != VERSION(fabric_v2, 2)) return VERSION_MISMATCH;
    int code = get_fabric(d, &full);
    if (code) return code;
    memcpy(out->uuid, full.uuid, 16);
    out->status = full.status, out->clique = full.clique, out->state = full.state, out->mask = full.mask;
    if (newest) out->summary = full.summary;
    return SUCCESS;
}

/* --- MIG --- */

PAIR(450, MigMode)
UINT(450, MaxMigDeviceCount)
UINT(450, GpuInstanceId)
UINT(450, ComputeInstanceId)

API(450) nvmlDeviceIsMigDeviceHandle(H d, U *out) {
    if (!references) return UNINITIALIZED;
    if (!is_handle(d)) return INVALID_ARGUMENT;
    *out = d->mig != NO_MIG;
    return SUCCESS;
}

API(450) nvmlDeviceGetMigDeviceHandleByIndex(H d, U index, H *out) {
    answer a;
    device mig = {d->index, index};
    if (!references) return UNINITIALIZED;
    if (!is_handle(d) || index >= MAX_MIG) return INVALID_ARGUMENT;
    int code = ask(&mig, "UUID", 0, NULL, &a);
    if (code) return code == NOT_SUPPORTED ? NOT_FOUND : code;
    *out = &migs[d->index][index];
    return SUCCESS;
}

API(450) nvmlDeviceGetDeviceHandleFromMigDeviceHandle(H d, H *out) {
    if (!references) return UNINITIALIZED;
    if (!is_handle(d) || d->mig == NO_MIG) return INVALID_ARGUMENT;
    *out = &gpus[d->index];
    return SUCCESS;
}

/* --- field values --- */

enum { DOUBLE, UINT_T, ULONG, ULLONG, SLLONG, SINT, USHORT };

typedef struct {
    U id, scope;
    int64_t timestamp, latency_us;
    int type, code;
    union { double d; U ui; unsigned long ul; U64 ull; int64_t sll; int si; unsigned short us; } value;
} field_value;

/* The same fact under its own function, so that a scenario states it once; -1 is the scope. */
static const struct { U id; const char *function; int argc, args[2], token; } SAME[] = {
    {1, "EccMode", 0, {0}, 0}, {2, "EccMode", 0, {0}, 1},
    {3, "TotalEccErrors", 2, {0, 0}, 0}, {4, "TotalEccErrors", 2, {1, 0}, 0},
    {5, "TotalEccErrors", 2, {0, 1}, 0}, {6, "TotalEccErrors", 2, {1, 1}, 0},
    {83, "TotalEnergyConsumption", 0, {0}, 0}, {94, "PcieReplayCounter", 0, {0}, 0},
    {142, "RemappedRows", 0, {0}, 0}, {143, "RemappedRows", 0, {0}, 1},
    {144, "RemappedRows", 0, {0}, 2}, {145, "RemappedRows", 0, {0}, 3},
    {161, "NvLinkErrorCounter", 2, {-1, 0}, 0}, {162, "NvLinkErrorCounter", 2, {-1, 1}, 0},
    {163, "NvLinkErrorCounter", 2, {-1, 2}, 0}, {165, "NvLinkState", 1, {-1}, 0},
    {166, "NvLinkVersion", 1, {-1}, 0}, {185, "PowerUsage", 0, {0}, 0},
    {186, "PowerUsage", 0, {0}, 0}, {187, "PowerManagementLimitConstraints", 0, {0}, 0},
    {188, "PowerManagementLimitConstraints", 0, {0}, 1},
    {189, "PowerManagementDefaultLimit", 0, {0}, 0}, {190, "EnforcedPowerLimit", 0, {0}, 0},
    {191, "TotalEnergyConsumption", 0, {0}, 0}, {192, "PowerManagementLimit", 0, {0}, 0},
};

/* The first driver branch that knows the field (the first CUDA header that names it). */
static int field_since(U id) {
    static const struct { U first; int branch; } SINCE[] = {
        {289, 610}, {272, 590}, {269, 580}, {251, 570}, {235, 560}, {231, 575}, {230, 570},
        {201, 560}, {197, 555}, {173, 535}, {169, 525}, {0, 0}};
    int i = 0;
    while (id < SINCE[i].first) i++;
    return SINCE[i].branch;
}

/* The three newest event reason counters moved from 251..253 to 269..271 with 580.82. */
static const char *renumbered(U id) {
    static const char *const NAMES[] = {"field.sw_thermal", "field.hw_thermal", "field.hw_power_brake"};
    int moved = branch > 580 || (branch == 580 && revision >= 82);
    U first = moved ? 269 : branch >= 575 ? 251 : UINT32_MAX - 3;
    return id >= first && id < first + 3 ? NAMES[id - first] : NULL;
}

static int default_type(U id) {
    if (id >= 193 && id <= 196) return SINT;
    if (id == 1 || id == 2 || id == 82 || id == 91 || id == 147 || (id >= 142 && id <= 145)) return UINT_T;
    if (id == 94 || id == 95 || (id >= 164 && id <= 192 && id != 191) || id == 230) return UINT_T;
    return ULLONG;
}

static int ask_field(H d, U id, U scope, answer *a, int *which) {
    U args[2] = {id, scope};
    const char *name = renumbered(id);
    *which = 0;
    if (field_since(id) > branch) return INVALID_ARGUMENT;
    if (name) return ask(d, name, 0, NULL, a);
    if (!knows(d, "field", 2, args))
        for (size_t i = 0; i < sizeof SAME / sizeof *SAME; i++)
            if (SAME[i].id == id) {
                U same[2];
                for (int j = 0; j < 2; j++) same[j] = SAME[i].args[j] < 0 ? scope : (U)SAME[i].args[j];
                *which = SAME[i].token;
                return ask(d, SAME[i].function, SAME[i].argc, same, a);
            }
    return ask(d, "field", 2, args, a);
}

static void read_field(H d, field_value *f) {
    static const char *const TYPES[] = {"double", "uint", "ulong", "ull", "sll", "int", "ushort"};
    answer a;
    int which;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    f->timestamp = t.tv_sec * 1000000LL + t.tv_nsec / 1000;
    f->latency_us = 3;
    memset(&f->value, 0, sizeof f->value);
    f->code = ask_field(d, f->id, f->scope, &a, &which);
    if (f->code) return;
    char *colon = strchr(a.text, ':');
    f->type = default_type(f->id);
    for (int i = 0; colon && i <= USHORT; i++)
        if (!strncmp(a.text, TYPES[i], colon - a.text)) f->type = i;
    if (colon) memmove(a.text, colon + 1, strlen(colon));
    U64 value = f->type == DOUBLE ? 0 : number(&a, which);
    switch (f->type) {
    case DOUBLE: f->value.d = real(&a, which); break;
    case UINT_T: f->value.ui = (U)value; break;
    case ULONG: f->value.ul = value; break;
    case SLLONG: f->value.sll = (int64_t)value; break;
    case SINT: f->value.si = (int)value; break;
    case USHORT: f->value.us = (unsigned short)value; break;
    default: f->value.ull = value;
    }
}

API(0) nvmlDeviceGetFieldValues(H d, int count, field_value *out) {
    answer a;
    if (!references) return UNINITIALIZED;
    if (!is_handle(d) || count < 1) return INVALID_ARGUMENT;
    int code = ask(d, "FieldValues", 0, NULL, &a);
    if (code && code != NOT_SUPPORTED) return code;
    for (int i = 0; i < count; i++) read_field(d, &out[i]);
    return SUCCESS;
}

/* ViolationStatus: types 0..5, 10, 11 are the fields 74..81 */
API(0) nvmlDeviceGetViolationStatus(H d, U type, U64 *out) {
    answer a;
    int which;
    struct timespec t;
    if (!references) return UNINITIALIZED;
    if (!is_handle(d)) return INVALID_ARGUMENT;
    U offset = type <= 5 ? type : type == 10 ? 6 : type == 11 ? 7 : 99;
    if (offset == 99) return INVALID_ARGUMENT;
    int code = ask_field(d, 74 + offset, 0, &a, &which);
    clock_gettime(CLOCK_REALTIME, &t);
    if (!code) out[0] = t.tv_sec * 1000000ULL + t.tv_nsec / 1000, out[1] = number(&a, which);
    return code;
}
