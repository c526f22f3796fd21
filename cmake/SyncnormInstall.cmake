# Installs the library so that find_package(syncnorm CONFIG) gives syncnorm::syncnorm, from any prefix.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(syncnorm_package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/syncnorm")
cmake_path(GET SYNCNORM_TORCH_CONFIG PARENT_PATH SYNCNORM_TORCH_BUILT_WITH)

# CMake drops link paths inside the project from an installed library, and .local/venv is one.
set_target_properties(syncnorm PROPERTIES
  INSTALL_RPATH "${SYNCNORM_TORCH_LIBRARY_FOLDER}" INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS syncnorm EXPORT syncnormTargets)
install(DIRECTORY include/syncnorm DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT syncnormTargets NAMESPACE syncnorm:: DESTINATION "${syncnorm_package_folder}")

configure_package_config_file(cmake/syncnormConfig.cmake.in "${PROJECT_BINARY_DIR}/syncnormConfig.cmake"
  INSTALL_DESTINATION "${syncnorm_package_folder}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/syncnormConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(
  FILES "${PROJECT_BINARY_DIR}/syncnormConfig.cmake" "${PROJECT_BINARY_DIR}/syncnormConfigVersion.cmake"
    cmake/SyncnormTorch.cmake
  DESTINATION "${syncnorm_package_folder}")
