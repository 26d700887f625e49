// Calls what Python has derived from TensorRT's interfaces as TensorRT 10 does: through the C++ virtual functions, so
// that the real bindings' trampolines hand each call to the Python class. Only the order of the virtual functions is
// reproduced: NvInferRuntimeBase.h (ILogger, IVersionedInterface) and NvInfer.h (v_1_0::IProgressMonitor,
// IInt8Calibrator) of v10.3.0 and v10.16.
#include <cstddef>
#include <cstdint>

struct InterfaceInfo { const char* kind; int32_t major, minor; };

struct Logger {
  virtual void log(int32_t severity, const char* text) noexcept = 0;
  virtual ~Logger() = default;
};

struct Versioned {
  virtual int32_t getAPILanguage() const noexcept = 0;
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~Versioned() noexcept = default;
};

struct ProgressMonitor : Versioned {
  virtual void phaseStart(const char* phase, const char* parent, int32_t steps) noexcept = 0;
  virtual bool stepComplete(const char* phase, int32_t step) noexcept = 0;
  virtual void phaseFinish(const char* phase) noexcept = 0;
};

struct Calibrator : Versioned {
  virtual int32_t getBatchSize() const noexcept = 0;
  virtual bool getBatch(void* bindings[], const char* const names[], int32_t count) noexcept = 0;
  virtual const void* readCalibrationCache(std::size_t& length) noexcept = 0;
  virtual void writeCalibrationCache(const void* cache, std::size_t length) noexcept = 0;
};

extern "C" {
void logger_log(void* it, int severity, const char* text) { static_cast<Logger*>(it)->log(severity, text); }
void phase_start(void* it, const char* phase, const char* parent, int steps) {
  static_cast<ProgressMonitor*>(it)->phaseStart(phase, parent, steps);
}
int step_complete(void* it, const char* phase, int step) {
  return static_cast<ProgressMonitor*>(it)->stepComplete(phase, step);
}
void phase_finish(void* it, const char* phase) { static_cast<ProgressMonitor*>(it)->phaseFinish(phase); }
int batch_size(void* it) { return static_cast<Calibrator*>(it)->getBatchSize(); }
int get_batch(void* it, void** bindings, const char** names, int count) {
  return static_cast<Calibrator*>(it)->getBatch(bindings, names, count);
}
const void* read_cache(void* it, std::size_t* length) { return static_cast<Calibrator*>(it)->readCalibrationCache(*length); }
void write_cache(void* it, const void* cache, std::size_t length) {
  static_cast<Calibrator*>(it)->writeCalibrationCache(cache, length);
}
}
